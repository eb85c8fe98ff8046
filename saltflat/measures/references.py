"""Where each measure comes from."""

REFERENCES = {
    "tsuzuku2020normalized": "Tsuzuku, Sato, Sugiyama. Normalized Flat Minima: Exploring Scale Invariant Definition of "
    "Flat Minima for Neural Networks Using PAC-Bayesian Analysis. ICML 2020.",
    "petzka2019reparameterization": "Petzka, Adilova, Kamp, Sminchisescu. A Reparameterization-Invariant Flatness "
    "Measure for Deep Neural Networks. 2019.",
    "petzka2021relative": "Petzka, Kamp, Adilova, Sminchisescu, Boley. Relative Flatness and Generalization. "
    "NeurIPS 2021.",
    "ibayashi2021minimum": "Ibayashi, Hamaguchi, Imaizumi. Minimum Sharpness: Scale-Invariant Parameter-Robustness of "
    "Neural Networks. 2021.",
    "jia2020information": "Jia, Su. Information-Theoretic Local Minima Characterization and Regularization. ICML 2020.",
    "neyshabur2017exploring": "Neyshabur, Bhojanapalli, McAllester, Srebro. Exploring Generalization in Deep Learning. "
    "NeurIPS 2017.",
    "jiang2020fantastic": "Jiang, Neyshabur, Mobahi, Krishnan, Bengio. Fantastic Generalization Measures and Where to "
    "Find Them. ICLR 2020.",
    "liang2019fisher": "Liang, Poggio, Rakhlin, Stokes. Fisher-Rao Metric, Geometry, and Complexity of Neural "
    "Networks. AISTATS 2019.",
    "rangamani2019scale": "Rangamani, Nguyen, Kumar, Phan, Chin, Tran. A Scale Invariant Flatness Measure for Deep "
    "Network Minima. 2019.",
    "foret2021sharpness": "Foret, Kleiner, Mobahi, Neyshabur. Sharpness-Aware Minimization for Efficiently Improving "
    "Generalization. ICLR 2021.",
    "andriushchenko2023modern": "Andriushchenko, Croce, Mueller, Hein, Flammarion. A Modern Look at the Relationship "
    "between Sharpness and Generalization. ICML 2023.",
}
